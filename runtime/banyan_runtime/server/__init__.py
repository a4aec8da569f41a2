"""The processes of one server, put together: the front process (`serve`), its engine child, and how either ends.

`termination.py` is also how a batch run ends; nothing else in here is imported from outside but by the command line.
"""
