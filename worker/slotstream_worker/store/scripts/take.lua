-- Take sessions that a process that is no more (or this one, its claim's answer lost) owns.
--
-- ARGV[4] worker   ARGV[5] the owner they are taken from
-- ARGV[6] 'dead': only while the owner's lease is gone; 'name': it is an older process of the
--         worker's own name; 'self': the worker itself, under a new epoch
-- ARGV[7] how many the worker has room for; the rest go to the front of `waiting`
-- ARGV[8...] the sessions
-- Returns {rows taken, how many were put back, how many were closed}.
local worker, old, why, room = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local taken, put_back, closed = {}, 0, 0
if why == 'dead' and redis.call('EXISTS', prefix .. 'lease:' .. old) == 1 then
  return {taken, put_back, closed}
end
for i = 8, #ARGV do
  local session = ARGV[i]
  local row = row_of(session)
  if not row or row.owner ~= old or (row.status ~= 'live' and row.status ~= 'closing') then
    redis.call('SREM', prefix .. 'owned:' .. old, session)
  elseif row.status == 'closing' then
    finish(session, row, 'close', nil, nil, '')
    closed = closed + 1
  elseif #taken < room then
    taken[#taken + 1] = own(session, row, worker)
  elseif why ~= 'self' then
    requeue(session, row)
    put_back = put_back + 1
  end
end
if why ~= 'self' and redis.call('SCARD', prefix .. 'owned:' .. old) == 0 then
  redis.call('SREM', prefix .. 'workers', old)
end
return {taken, put_back, closed}
