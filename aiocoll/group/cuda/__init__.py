"""Calls on CUDA arrays: what the group does with them in place of its own way; loaded with the first such call.

Bottom up: `enqueued`, `cards`, `native`, `staged` and `matching` know nothing of each other; `communicator`, `deciding`
and `native_messages` keep what a group has on its device; `side` holds it; `agreed`, `together` and `messages` are the
operations; `on_device` is the door.
"""
