"""How ranks find each other through a store, before there is any link.

place        the store itself, held by all groups of a rank that meet there
cards        what a rank tells of itself: one card per rank of a new group
growth       tickets and seats of newcomers to a group that grows
merging      tickets of whole groups that become one
"""
