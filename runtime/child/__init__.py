"""Child processes: started, watched, talked to in messages, restarted and ended.

In: a module to run and messages for it. Out: its messages, and one clear error when it died or
hangs.
"""
