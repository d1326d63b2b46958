"""From an init method to a group: the only package that combines store, transport and engine.

new_group    init method -> store, rank, world size
job          what the groups of one rank in one job share: store, key, endpoint
exchange     what the ranks tell each other through the store
measured_links  what the links between hosts do
same_host    which ranks can reach each other's unix sockets
unmet        why ranks have not met, in words
dry_run      the job of a rank without peers (backend "fake")
"""
