"""Meeting of ranks through a store, before any link is open.

store_handle  the store itself, shared by all jobs of a rank that use it
claim         exclusive claims of ranks by processes
cards         the card that each rank of a job publishes about itself
growth        tickets and assignments of newcomers to a growing group
merging       tickets of whole groups that become one group
holders       arrivals and deaths of ticket holders
"""
