-- Put a session that was set aside back in the queue, from where it stood, or discard it.
-- ARGV[5] session, ARGV[6] the epoch it was set aside under, ARGV[7] 'retry' or 'discard'
-- Returns ok | gone (not set aside, or since then once more) | open (its id is in use again) |
-- superseded (it has been) | busy (entries came meanwhile).
local session, epoch, what = ARGV[5], ARGV[6], ARGV[7]
local slot, aside, kept = key('slot', session), key('aside', session), key('aside-in', session)
if redis.call('HGET', aside, 'epoch') ~= epoch then return 'gone' end
if what == 'discard' then
  redis.call('DEL', aside, kept)
  redis.call('SREM', prefix .. 'aside', session)
  return 'ok'
end
local row = row_of(session)
if row and row.status ~= 'closed' then return 'open' end
if redis.call('HEXISTS', aside, 'superseded') == 1 then return 'superseded' end
if redis.call('EXISTS', key('in', session)) == 1 then return 'busy' end
redis.call('DEL', slot, key('out', session))
redis.call('RENAME', aside, slot)
if redis.call('EXISTS', kept) == 1 then redis.call('RENAME', kept, key('in', session)) end
redis.call('HDEL', slot, 'set_aside', 'at')
redis.call('HSET', slot, 'status', 'waiting', 'owner', '', 'attempts', '0')
redis.call('HDEL', slot, 'trial')
redis.call('SREM', prefix .. 'aside', session)
redis.call('SADD', prefix .. 'sessions', session)
enqueue(session, 1)
return 'ok'
