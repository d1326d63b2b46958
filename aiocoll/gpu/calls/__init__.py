"""Collectives and messages of a group on CUDA arrays, imported with the group's first such call.

From the lowest layer up: `enqueued`, `cards`, `native`, `staged` and `matching` are independent of each other. `kinds`,
`communicator`, `backend_agreement`, `slots` and `native_messages` are parts of `device_state`, the state of a group on
its device. `agreed`, `batched` and `messages` are the operations. `device_calls` makes them for the dispatcher.
"""
