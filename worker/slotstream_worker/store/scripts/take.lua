-- Take sessions that a process that is no more (or this one, its claim's answer lost) owns.
--
-- ARGV[5] worker   ARGV[6] the owner they are taken from
-- ARGV[7] 'dead': only while the owner's lease is gone; 'name': it is an older process of the
--         worker's own name; 'self': the worker itself, under a new epoch
-- ARGV[8] how many the worker has room for; the rest go to the front of `waiting`
-- ARGV[9...] the sessions
-- Returns {rows taken, put back, closed, set aside}.
local worker, old, why, room = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])
local taken, put_back, closed, aside = {}, 0, 0, 0
if why == 'dead' and redis.call('EXISTS', prefix .. 'lease:' .. old) == 1 then
  return {taken, put_back, closed, aside}
end

-- An owner died with entries of this session unanswered. Any of its sessions may be the cause, so
-- the deaths of a whole company count to two at most; what follows is counted by trials.
local function blame(session, row)
  local attempts = tonumber(row.attempts)
  if why ~= 'self' and attempts < 2 and unanswered(session, row) then
    attempts = attempts + 1
    redis.call('HSET', key('slot', session), 'attempts', attempts)
    row.attempts = tostring(attempts)
  end
end

for i = 9, #ARGV do
  local session = ARGV[i]
  local row = row_of(session)
  if not row or row.owner ~= old or (row.status ~= 'live' and row.status ~= 'closing') then
    redis.call('SREM', prefix .. 'owned:' .. old, session)
  elseif row.status == 'closing' then
    finish(session, row, 'close', nil, nil, '')
    closed = closed + 1
  else
    blame(session, row)
    if tonumber(row.attempts) >= max_attempts then
      set_aside(session, row)
      aside = aside + 1
    elseif #taken < room then
      taken[#taken + 1] = own(session, row, worker)
    elseif why ~= 'self' then
      requeue(session, row)
      put_back = put_back + 1
    end
  end
end
if why ~= 'self' and redis.call('SCARD', prefix .. 'owned:' .. old) == 0 then
  redis.call('SREM', prefix .. 'workers', old)
end
return {taken, put_back, closed, aside}
