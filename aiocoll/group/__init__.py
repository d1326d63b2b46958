"""`ProcessGroup` and its calls: check the arguments, find the plan, take a number, start.

calls, planning, launch          a checked call, its plan, its way to the engine
collectives, point_to_point,
objects, arrays, sparse_reduce   the calls of a group, by what they carry
coalesce, flushing, fuse         calls of a block that travel together
estimate, detail                 calls that are predicted, or compared before they start
on_device, device_side           calls on CUDA arrays, and what a group has on the device for them
agreed, together, cards          what the ranks agree on before such a call, or those of a block, begin
native, communicator             those that NCCL carries out
staged, device_messages          those that the host carries out
recovery, subgroups              other groups made of this one
recording                        what the group did last
process_group                    all of it together
"""
