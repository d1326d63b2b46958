"""Rendezvous: the steps from an init method to a group. Only this package combines store, transport and engine.

new_group       init method -> store, rank, world size
job             one rank in one job: the store, key and endpoint that its groups share
exchange        values that the ranks exchange through the store
measured_links  latency and bandwidth of the links between hosts
same_host       grouping of the ranks that can reach each other's unix sockets
unmet           error texts for ranks that did not meet
dry_run         the job of a rank without peers (backend "fake")
"""
