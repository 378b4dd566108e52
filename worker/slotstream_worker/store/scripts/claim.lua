-- Claim the sessions that have waited longest. ARGV[4] worker, ARGV[5] how many at most,
-- ARGV[6] bytes of state to return at most (one session always). Returns their rows.
local worker, room, budget = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local claimed = {}
for _, session in ipairs(redis.call('ZRANGE', prefix .. 'waiting', 0, room - 1)) do
  local row = row_of(session)
  if row and row.status == 'waiting' then
    budget = budget - redis.call('HSTRLEN', key('slot', session), 'state')
    if budget < 0 and #claimed > 0 then break end
    claimed[#claimed + 1] = own(session, row, worker)
  else
    redis.call('ZREM', prefix .. 'waiting', session)
  end
end
return claimed
