"""Workflows served by an app: the doing beside `flows/control`, which decides.

In: workflows and their inputs. Out: jobs with results and events; orders done by engine, encoder,
retrieval worker and threads for functions.
"""
