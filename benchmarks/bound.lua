-- The least a commit can be: a fence, the replies, `done`. Many sessions a call.
--
-- ARGV[1] prefix   ARGV[2] owner   ARGV[3] weights, then for each session
--   session epoch done-built-on n, and n times: id, output
-- Returns how many replies were written; a session whose fence does not hold writes none.
local prefix, owner, weights = ARGV[1], ARGV[2], ARGV[3]
local i, written = 4, 0
while i <= #ARGV do
  local session, n = ARGV[i], tonumber(ARGV[i + 3])
  local last = i + 3 + 2 * n
  local slot = prefix .. 'slot:' .. session
  local row = redis.call('HMGET', slot, 'owner', 'epoch', 'done')
  if row[1] == owner and row[2] == ARGV[i + 1] and row[3] == ARGV[i + 2] then
    local out = prefix .. 'out:' .. session
    for k = i + 4, last, 2 do
      redis.call('XADD', out, ARGV[k], 'output', ARGV[k + 1], 'weights', weights)
    end
    redis.call('HSET', slot, 'done', ARGV[last - 1])
    written = written + n
  end
  i = last + 1
end
return written
