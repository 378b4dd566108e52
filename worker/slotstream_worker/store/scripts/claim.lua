-- Claim sessions that wait. ARGV[5] worker, ARGV[6] bytes of state to return at most (one session
-- always), ARGV[7] the version of the weights that those begin on whose row names none, ARGV[8...]
-- the sessions, as read from the front of the queue. One that another worker has claimed meanwhile
-- is passed over. Returns their rows.
local worker, budget, weights = ARGV[5], tonumber(ARGV[6]), ARGV[7]
local claimed = {}
if not alive(worker) then return claimed end
for i = 8, #ARGV do
  local session = ARGV[i]
  local row = row_of(session)
  if row and row.status == 'waiting' then
    if tonumber(row.attempts) >= max_attempts then
      set_aside(session, row)
    else
      budget = budget - redis.call('HSTRLEN', key('slot', session), 'state')
      if budget < 0 and #claimed > 0 then break end
      -- Before anything is answered: whoever replays the answers must know what gave them.
      if weights ~= '' and (redis.call('HGET', key('slot', session), 'weights') or '') == '' then
        redis.call('HSET', key('slot', session), 'weights', weights)
      end
      claimed[#claimed + 1] = own(session, row, worker)
    end
  else
    redis.call('ZREM', prefix .. 'waiting', session)
  end
end
return claimed
