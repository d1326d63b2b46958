"""`ProcessGroup` and the parts it is made of: they check a call's arguments, find its plan, number it and start it.

process_group                    the class of the user, which delegates to all others
dispatch                         a checked call, its plan, its way to the engine
collectives, messages, objects,
sparse_reduce, sparse_move,
unsized, empty                   the calls of a group, by what they carry
interceptors                     calls that are fused, verified, predicted or simulated instead of started directly
cuda                             calls on CUDA arrays, loaded with the first of them
reconfigurer                     other groups made from this one
lifetime, open_groups            pending works, revocation, closing; the open groups of the process
flight_recorder                  the log of the group's last operations
"""
