"""How ranks find each other through a store, before any link is open.

store_handle  the store itself, shared by all jobs of a rank that use it
claim         which rank a process is, and that no other process is it
cards         what a rank publishes about itself: one card per rank of a job
growth        tickets and assignments of newcomers to a group that grows
merging       tickets of whole groups that become one
"""
