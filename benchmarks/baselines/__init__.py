"""Other ways to schedule workflows, on the messages that ours speaks: what it is compared with."""
