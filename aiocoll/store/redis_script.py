"""What a Redis server carries out for a `RedisStore`: one script, so that each request is one step there.

All that a job has on the server is one hash, so its entries are lost together or not at all: by a restart, by an
eviction, or when they expire. Its fields are

    job         a random number of the hash itself; when it is another one, or absent, the entries have been lost
    CLIENT      for each client, the number of its last change and the result of that
    =NAME       the value of the entry NAME

A client numbers its changes, and says which one was the last whose result it knows. A change that comes again, since
its answer had been lost with a connection, is answered and not repeated. A server that has forgotten a change which it
had answered, since it was restarted from an older copy of its data, is found out, and the hash is removed: whoever goes
on would wait for what is not there.

Each change renews the time at which the hash expires, and publishes the names of the entries to whoever waits.
"""

from __future__ import annotations

from typing import Final

__all__ = ["CHANGES", "LOST", "SCRIPT"]

#: Requests that change entries.
CHANGES: Final = frozenset({"swap", "set", "add"})
#: The answer to a request for entries that are gone.
LOST: Final = b"lost"

#: The hash is KEYS[1]. Arguments: its random number, the client, the number of the change, the last change whose result
#: the client knows, milliseconds until the hash expires, the request, and the arguments of the request.
SCRIPT: Final = """
local hash = KEYS[1]
local job, client, number, known, lifetime, request = unpack(ARGV, 1, 6)

if request == 'open' then
    redis.call('HSETNX', hash, 'job', job)
    redis.call('HSETNX', hash, client, '0 ')
    redis.call('PEXPIRE', hash, lifetime)
    return redis.call('HGET', hash, 'job')
end

if redis.call('HGET', hash, 'job') ~= job then
    return 'lost'
end
local last, result = string.match(redis.call('HGET', hash, client) or '', '^(%d+) (.*)$')
if not last or tonumber(last) < tonumber(known) then
    redis.call('DEL', hash)
    return 'lost'
end

if request == 'read' then
    local values = {}
    for i = 7, #ARGV do
        values[i - 6] = redis.call('HGET', hash, ARGV[i])
    end
    return {values}
elseif request == 'names' then
    return {redis.call('HKEYS', hash)}
elseif request == 'renew' then
    redis.call('PEXPIRE', hash, lifetime)
    return {''}
elseif tonumber(last) >= tonumber(number) then
    return {result}
end

local changed = {}
result = ''
if request == 'swap' then
    local name, old, new = ARGV[7], ARGV[8], ARGV[9]
    local value = redis.call('HGET', hash, name)
    if (value and '=' .. value or '') == old then
        if new == '' then
            redis.call('HDEL', hash, name)
        else
            redis.call('HSET', hash, name, string.sub(new, 2))
        end
        changed = {name}
        result = 'done'
    end
elseif request == 'set' then
    for i = 7, #ARGV, 2 do
        redis.call('HSET', hash, ARGV[i], ARGV[i + 1])
        changed[#changed + 1] = ARGV[i]
    end
elseif request == 'add' then
    if type(redis.pcall('HINCRBY', hash, ARGV[7], ARGV[8])) == 'number' then
        changed = {ARGV[7]}
        result = redis.call('HGET', hash, ARGV[7])
    end
end
redis.call('HSET', hash, client, number .. ' ' .. result)
redis.call('PEXPIRE', hash, lifetime)
for _, name in ipairs(changed) do
    redis.call('PUBLISH', hash, name)
end
return {result}
"""
