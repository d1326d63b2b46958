"""`ProcessGroup` and its components, which check, number and start calls.

process_group                    the public class, which delegates to all other modules
dispatch                         the path from a checked call through its plan to the engine
collectives, messages, objects,
sparse_reduce, sparse_move,
sparse_messages, unsized, empty  the calls of a group, by payload
plans                            calls that are checked once and started many times
cartesian, grid, halo            groups whose ranks form a grid, and the exchange of ghost cells
interceptors                     calls that are fused, verified, predicted or simulated instead of started directly
reconfigurer                     other groups made from a group
lifetime, open_groups            pending works, revocation, closing; the open groups of the process
flight_recorder, stats, top_view the log of the last operations, the counters, the state for `aiocoll top`
"""
