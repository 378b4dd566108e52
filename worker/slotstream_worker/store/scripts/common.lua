-- What every script begins with. A session's keys are made from the partition's prefix, so all
-- keys of a script lie in one hash slot; KEYS[1], a key of that partition, only routes the call.
--
-- ARGV[1] prefix, "{app:p}:"   ARGV[2] how long replies of a closed session stay, ms
-- ARGV[3] replies an open session keeps
local prefix, reply_ttl, retention = ARGV[1], ARGV[2], ARGV[3]

local function key(kind, session) return prefix .. kind .. ':' .. session end

-- Ids are two unsigned 64-bit numbers, more than a Lua number holds: compared and counted as text.
local function order(a, b)
  if #a ~= #b then return #a - #b end
  if a == b then return 0 end
  return a < b and -1 or 1
end

local function later(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  local by_ms = order(a_ms, b_ms)
  if by_ms ~= 0 then return by_ms > 0 end
  return order(a_seq, b_seq) > 0
end

local function plus_one(number)
  local nines = #string.match(number, '9*$')
  local head = string.sub(number, 1, #number - nines)
  if head == '' then return '1' .. string.rep('0', nines) end
  local digit = tonumber(string.sub(head, -1)) + 1
  return string.sub(head, 1, -2) .. digit .. string.rep('0', nines)
end

local function after(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if seq == '18446744073709551615' then return plus_one(ms) .. '-0' end
  return ms .. '-' .. plus_one(seq)
end

local function last_id(stream)
  local info = redis.pcall('XINFO', 'STREAM', stream)
  if info.err then return '0-0' end
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
  return '0-0'
end

local FIELDS = {'status', 'owner', 'epoch', 'cursor', 'done', 'cuts', 'token', 'mark', 'replies'}

local function row_of(session)
  local values = redis.call('HMGET', key('slot', session), unpack(FIELDS))
  if not values[1] then return nil end
  local row = {}
  for i, name in ipairs(FIELDS) do row[name] = values[i] or '' end
  return row
end

-- Into the queue of those that wait for a worker: recoveries (class 0) before the new (class 1),
-- then by arrival.
local function enqueue(session, class)
  local arrival = redis.call('INCR', prefix .. 'epoch')
  redis.call('ZADD', prefix .. 'waiting', class * 4503599627370496 + arrival, session)
end

-- Close a session: its last reply, `in` deleted, the row a tombstone that goes when the replies go.
-- `id` and `fields` are the answer that the end rides on, if it answers an entry; `mark` is the
-- id of a close mark that was reached, which is not counted.
local function finish(session, row, reason, id, fields, mark)
  local inbox, outbox, slot = key('in', session), key('out', session), key('slot', session)
  -- pcall: a producer that made `in` something else than a stream ends its own session only.
  redis.pcall('XTRIM', inbox, 'MINID', '=', after(id or row.done))
  local cancelled = redis.pcall('XLEN', inbox)
  if type(cancelled) == 'table' then cancelled = 0 end
  for _, m in ipairs(mark ~= row.mark and {mark, row.mark} or {row.mark}) do
    if m ~= '' then cancelled = cancelled - #redis.pcall('XRANGE', inbox, m, m) end
  end
  local reply = fields or {}
  for _, part in ipairs({'end', '1', 'reason', reason, 'cancelled', tostring(cancelled)}) do
    reply[#reply + 1] = part
  end
  if not id then
    local a, b = last_id(inbox), last_id(outbox)
    id = after(later(a, b) and a or b)
  end
  -- Refused only where no larger id exists; the session must end all the same.
  redis.pcall('XADD', outbox, id, unpack(reply))
  redis.call('DEL', inbox, slot)
  redis.call('HSET', slot, 'status', 'closed', 'token', row.token, 'end', id)
  redis.call('PEXPIRE', slot, reply_ttl)
  redis.call('PEXPIRE', outbox, reply_ttl)
  redis.call('ZREM', prefix .. 'waiting', session)
  redis.call('SREM', prefix .. 'sessions', session)
  if row.owner ~= '' then redis.call('SREM', prefix .. 'owned:' .. row.owner, session) end
end

local function requeue(session, row)
  if row.status == 'closing' then return finish(session, row, 'close', nil, nil, '') end
  redis.call('SREM', prefix .. 'owned:' .. row.owner, session)
  redis.call('HSET', key('slot', session), 'status', 'waiting', 'owner', '')
  enqueue(session, 0)
end

-- Make `worker` the owner under a new epoch; returns what it needs to go on from the row.
local function own(session, row, worker)
  local slot, outbox = key('slot', session), key('out', session)
  local epoch = redis.call('INCR', prefix .. 'epoch')
  if row.owner ~= '' then redis.call('SREM', prefix .. 'owned:' .. row.owner, session) end
  redis.call('SADD', prefix .. 'owned:' .. worker, session)
  redis.call('HSET', slot, 'status', 'live', 'owner', worker, 'epoch', epoch)
  redis.call('ZREM', prefix .. 'waiting', session)
  if redis.call('EXISTS', outbox) == 0 then
    redis.pcall('XADD', outbox, '0-1', 'op', 'opened', 'worker', worker)
  end
  local held = redis.call('HMGET', slot, 'epoch', 'cursor', 'done', 'cuts', 'count', 'skipped',
                          'weights', 'layout', 'state')
  table.insert(held, 1, session)
  return held
end
