-- Put a session that was set aside back in the queue, from where it stood. ARGV[5] session.
-- Returns 1; 0 where it is not set aside, or its id is in use again, or entries came meanwhile.
local session = ARGV[5]
local row = row_of(session)
if redis.call('EXISTS', key('aside', session)) == 0 or (row and row.status ~= 'closed')
    or redis.call('EXISTS', key('in', session)) == 1 then
  return 0
end
redis.call('DEL', key('slot', session), key('out', session))
redis.call('RENAME', key('aside', session), key('slot', session))
if redis.call('EXISTS', key('aside-in', session)) == 1 then
  redis.call('RENAME', key('aside-in', session), key('in', session))
end
redis.call('HDEL', key('slot', session), 'set_aside', 'at')
redis.call('HSET', key('slot', session), 'status', 'waiting', 'owner', '', 'attempts', '0')
redis.call('SREM', prefix .. 'aside', session)
redis.call('SADD', prefix .. 'sessions', session)
enqueue(session, 0)
return 1
