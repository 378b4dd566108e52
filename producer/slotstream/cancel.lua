-- Cancel one entry of a session that has not been answered yet.
--
-- KEYS[1]  the session's row      {app:p}:slot:<session>
-- KEYS[2]  the session's entries  {app:p}:in:<session>
-- ARGV[1]  the id of the entry
--
-- Returns 1 (cancelled), 0 (no such entry; nothing has changed) or -1 (refused: the entry has
-- been answered). Ids are compared as text: a Lua number holds only 53 bits of a part's 64.

local function parts(id)
  local ms, seq = string.match(id, '^0*(%d+)%-0*(%d+)$')
  if not ms then
    ms, seq = string.match(id, '^0*(%d+)$'), '0'
  end
  return ms, seq
end

local function compare(a, b)
  if #a ~= #b then
    return #a < #b and -1 or 1
  end
  if a == b then
    return 0
  end
  -- Digit by digit: the operator on strings follows the server's locale.
  for i = 1, #a do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y and -1 or 1
    end
  end
end

local ms, seq = parts(ARGV[1])
if not ms then
  return redis.error_reply("ERR an entry's id is two numbers, as in 12-0")
end

local status = redis.call('HGET', KEYS[1], 'status')
local open = status and status ~= 'closed'
if open then
  local done_ms, done_seq = parts(redis.call('HGET', KEYS[1], 'done') or '0-0')
  local order = compare(ms, done_ms)
  if order < 0 or (order == 0 and compare(seq, done_seq) <= 0) then
    return -1
  end
end

local after = '(' .. (open and redis.call('HGET', KEYS[1], 'done') or '0-0')
local oldest = redis.call('XRANGE', KEYS[2], after, '+', 'COUNT', 1)[1]
local deleted = redis.call('XDEL', KEYS[2], ARGV[1])
if open and deleted == 1 then
  redis.call('HINCRBY', KEYS[1], 'cuts', 1)
  local now = redis.call('XRANGE', KEYS[2], after, '+', 'COUNT', 1)[1]
  if not now or now[1] ~= oldest[1] then
    -- Its workers may have died of this entry: the next one is not blamed for it.
    for _, field in ipairs({'attempts', 'trial'}) do
      local count = redis.call('HGET', KEYS[1], field) or '0'
      if count ~= '0' then redis.call('HINCRBY', KEYS[1], field, '-' .. count) end
    end
  end
end
return deleted
