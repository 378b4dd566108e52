-- Take sessions that a process that is no more (or this one, its claim's answer lost) owns.
--
-- ARGV[5] worker   ARGV[6] the owner they are taken from
-- ARGV[7] 'dead': only while the owner's lease is gone; 'name': it is an older process of the
--         worker's own name; 'self': the worker itself, under a new epoch; 'leave': the worker
--         itself, which is leaving, and has room for none
-- ARGV[8] how many the worker has room for; the rest go to the front of `waiting`
-- ARGV[9...] the sessions
-- Returns {rows taken, put back, closed, set aside}.
local worker, old, why, room = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])
local taken, put_back, closed, aside = {}, 0, 0, 0
if (why == 'dead' and alive(old)) or (why ~= 'leave' and not alive(worker)) then
  return {taken, put_back, closed, aside}
end

-- An owner died while it had entries of this session after its checkpoint: those it ran, or those
-- it ran again. Any of its sessions may be the cause, so the deaths of a whole company count to
-- two; from there on only a death during the session's own trial counts.
local function blame(session, row)
  local attempts = tonumber(row.attempts) or 0
  local found = redis.pcall('XRANGE', key('in', session), '(' .. row.cursor, '+', 'COUNT', 1)
  if found.err or #found == 0 then return end
  if attempts < 2 or row.trial == row.epoch then
    row.attempts = tostring(attempts + 1)
    redis.call('HSET', key('slot', session), 'attempts', row.attempts)
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
    local died = why == 'dead' or why == 'name'
    if died then blame(session, row) end
    if died and tonumber(row.attempts) >= max_attempts then
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
if why ~= 'self' and why ~= 'leave' and redis.call('SCARD', prefix .. 'owned:' .. old) == 0 then
  redis.call('SREM', prefix .. 'workers', old)
end
return {taken, put_back, closed, aside}
