"""Calls on CUDA arrays: how a group carries them out; loaded with the first such call.

Bottom up: `enqueued`, `cards`, `native`, `staged` and `matching` are independent of each other; `kinds`,
`communicator`, `backend_agreement`, `slots` and `native_messages` are parts of `device_state`, all a group has on its
device; `agreed`, `batched` and `messages` are the operations; `device_calls` makes them for the dispatcher.
"""
