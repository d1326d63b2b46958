"""`ProcessGroup` and its calls: check the arguments, find the plan, take a number, start.

calls, planning, launch          a checked call, its plan, its way to the engine
collectives, point_to_point,
objects, arrays, sparse_reduce   the calls of a group, by what they carry
coalesce, flushing, fuse         calls of a block that travel together
estimate, detail                 calls that are predicted, or compared before they start
cuda                             calls on CUDA arrays, loaded with the first of them
recovery, subgroups              other groups made of this one
recording                        what the group did last
process_group                    all of it together
"""
