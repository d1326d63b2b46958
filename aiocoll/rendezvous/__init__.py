"""From an init method to a group: the only place that joins store, transport and engine.

new_group    init method -> store, rank, world size
home         what the groups of one rank in one job share: store, key, endpoint
fake         the home of a rank whose peers are not there
"""
