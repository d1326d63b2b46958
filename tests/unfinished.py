"""What does not keep a rule of `test_house.py` yet. These lists only get shorter."""

from __future__ import annotations

#: Modules in a cycle of imports.
STILL_IN_A_CYCLE: frozenset[str] = frozenset()

#: Folders that import each other.
FOLDERS_IN_A_CYCLE: frozenset[str] = frozenset(
    {
        "algorithms",
        "algorithms.flat",
        "algorithms.two_level",
    }
)

#: Modules of the engine that import a concrete transport.
IMPORT_A_TRANSPORT: frozenset[str] = frozenset()

#: Classes with more than two bases of ours, all the way up.
OF_MANY_BASES: frozenset[str] = frozenset(
    {
        "group.coalesce.Coalescing",
        "group.collectives.Collectives",
        "group.cuda.agreed.Agreed",
        "group.cuda.batched.BatchedCalls",
        "group.cuda.batched._Part",
        "group.cuda.messages.DeviceRecv",
        "group.cuda.messages.DeviceSend",
        "group.detail.DetailedGroup",
        "group.flushing.Flushing",
        "group.process_group.ProcessGroup",
        "group.recovery.Recovery",
        "group.subgroups.Subgroups",
        "rendezvous.fake.FakeGroup",
    }
)

#: Operations that are made of more than five arguments.
OF_MANY_ARGUMENTS: frozenset[str] = frozenset(
    {
        "engine.fusion.packer.Flush",
        "engine.matching.matching.PostedReceive",
        "engine.matching.outbound.OutboundMessage",
        "engine.operations.base.Operation",
        "engine.operations.object_exchange.ObjectExchange",
        "engine.operations.object_exchange.Post",
        "engine.operations.offload.Counted",
        "engine.operations.offload.Offload",
        "engine.operations.oneshot.OneShot",
        "engine.operations.program_executor.ProgramExecutor",
        "engine.operations.shm_ring.ShmRing",
        "engine.operations.unsized_gather.Gathered",
        "engine.operations.verify.Compared",
        "group.cuda.agreed.Agreed",
        "group.cuda.batched.BatchedCalls",
        "group.cuda.batched._Part",
        "group.cuda.messages.DeviceRecv",
        "group.cuda.messages.DeviceSend",
        "group.cuda.messages._OneEnd",
        "rendezvous.fake._Instant",
    }
)

#: Attributes that are declared in one file and set in another.
SET_ELSEWHERE: frozenset[str] = frozenset(
    {
        "engine.fusion.deferred_work.DeferredWork._progress",
        "engine.matching.matching.PostedReceive.peer",
        "engine.matching.outbound.OutboundMessage.peer",
        "engine.operations.verify.Inner._callbacks",
        "engine.operations.verify.Inner._code",
        "engine.operations.verify.Inner._done",
        "engine.operations.verify.Inner._exception",
        "engine.operations.verify.Inner._instruction",
        "engine.operations.verify.Inner._progress",
        "engine.operations.verify.Inner._result",
        "engine.operations.verify.Inner._source",
        "engine.operations.verify.Inner._unseen",
        "engine.operations.verify.Inner._unwrap",
        "engine.operations.verify.Inner._waiters",
        "engine.operations.verify.Inner._withdraw",
        "engine.operations.verify.Inner.group",
        "engine.operations.verify.Inner.key",
        "engine.operations.verify.Inner.op",
        "engine.operations.verify.Inner.seq",
        "group.cuda.agreed.Agreed._inner",
        "group.cuda.batched.BatchedCalls._marks",
        "group.cuda.batched._Part._marks",
        "group.cuda.batched._Part._settled",
        "group.cuda.communicator._Parting.reported",
        "group.cuda.communicator._Parting.warned",
        "group.cuda.messages.DeviceRecv.arrival",
        "group.cuda.messages.DeviceRecv.view",
        "group.detail.DetailedGroup._diverts",
        "group.detail.DetailedGroup._interceptor",
        "group.launch.Launcher._devices",
        "group.process_group.ProcessGroup._closed",
        "group.process_group.ProcessGroup._diverts",
        "group.process_group.ProcessGroup._ending",
        "group.process_group.ProcessGroup._origin",
        "group.recovery.Recovery._origin",
        "group.subgroups.Subgroups._ending",
        "rendezvous.fake.FakeGroup._diverts",
        "rendezvous.fake.FakeGroup._interceptor",
        "rendezvous.fake._Nowhere.cards",
        "rendezvous.fake._Nowhere.closed",
        "rendezvous.fake._Nowhere.control",
        "rendezvous.fake._Willing.taken",
        "work.Work._ends",
        "work.Work._ordered",
    }
)
