-- What every script begins with. All keys of a script lie in one hash slot, that of the prefix.
-- Keys are built from the prefix; on a cluster the caller declares all of them in KEYS as well, so
-- that Redis answers TRYAGAIN or ASK while the slot moves, instead of showing a row as absent.
--
-- ARGV[1] prefix, "{app:p}:"   ARGV[2] how long replies of a closed session stay, ms
-- ARGV[3] replies an open session keeps   ARGV[4] attempts after which a session is set aside
local prefix, reply_ttl, retention, max_attempts = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

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

-- Delete a stream's entries up to and including an id. pcall: what is no stream is left alone.
local function trim(stream, id)
  if id == '18446744073709551615-18446744073709551615' then
    redis.pcall('XTRIM', stream, 'MAXLEN', 0)
  else
    redis.pcall('XTRIM', stream, 'MINID', '=', after(id))
  end
end

local function last_id(stream)
  local info = redis.pcall('XINFO', 'STREAM', stream)
  if info.err then return '0-0' end
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
  return '0-0'
end

-- Not every row has `mark`, `replies` and `trial`: they are there while they say something.
local FIELDS = {'status', 'owner', 'epoch', 'cursor', 'done', 'cuts', 'token', 'mark', 'replies',
                'attempts', 'trial'}

local function row_of(session)
  local values = redis.pcall('HMGET', key('slot', session), unpack(FIELDS))
  if values.err or not values[1] then return nil end
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

-- The id of a last reply that answers no entry.
local function after_both(session)
  local a, b = last_id(key('in', session)), last_id(key('out', session))
  return after(later(a, b) and a or b)
end

-- The last reply of a session, and its row a tombstone that goes when the replies go.
local function bury(session, row, id, reply)
  local slot, outbox = key('slot', session), key('out', session)
  -- Refused only where no larger id exists; the session must end all the same.
  redis.pcall('XADD', outbox, id, unpack(reply))
  redis.call('DEL', key('in', session), slot)
  redis.call('HSET', slot, 'status', 'closed', 'token', row.token, 'end', id)
  redis.call('PEXPIRE', slot, reply_ttl)
  redis.call('PEXPIRE', outbox, reply_ttl)
  redis.call('ZREM', prefix .. 'waiting', session)
  redis.call('SREM', prefix .. 'sessions', session)
  if row.owner ~= '' then redis.call('SREM', prefix .. 'owned:' .. row.owner, session) end
end

-- Close a session: its last reply, `in` deleted, the row a tombstone that goes when the replies go.
-- `id` and `fields` are the answer that the end rides on, if it answers an entry; `mark` is the
-- id of a close mark that was reached, which is not counted.
local function finish(session, row, reason, id, fields, mark)
  local inbox = key('in', session)
  -- pcall: a producer that made `in` something else than a stream ends its own session only.
  trim(inbox, id or row.done)
  local cancelled = redis.pcall('XLEN', inbox)
  if type(cancelled) == 'table' then cancelled = 0 end
  for _, m in ipairs(mark ~= row.mark and {mark, row.mark} or {row.mark}) do
    if m ~= '' then cancelled = cancelled - #redis.pcall('XRANGE', inbox, m, m) end
  end
  local reply = fields or {}
  for _, part in ipairs({'end', '1', 'reason', reason, 'cancelled', tostring(cancelled)}) do
    reply[#reply + 1] = part
  end
  bury(session, row, id or after_both(session), reply)
end

-- The entries after `done` that are no close mark: the first one's id, and how many follow it.
local function unanswered(session, row)
  local found = redis.pcall('XRANGE', key('in', session), '(' .. row.done, '+')
  local first, behind = nil, 0
  for _, entry in ipairs(found.err and {} or found) do
    if entry[1] ~= row.mark then
      if first then behind = behind + 1 else first = entry[1] end
    end
  end
  return first, behind
end

-- A session that ended too many of its owners: its reader is told, its row and entries are kept
-- under other keys, where they can be listed and from where it can be retried.
local function set_aside(session, row)
  local first, behind = unanswered(session, row)
  redis.call('RENAME', key('slot', session), key('aside', session))
  redis.call('HSET', key('aside', session), 'set_aside', redis.call('TIME')[1], 'at', first or '')
  local last = first or after_both(session)
  redis.call('DEL', key('aside-in', session))  -- that of an earlier session of this id
  if redis.call('EXISTS', key('in', session)) == 1 then
    redis.call('RENAME', key('in', session), key('aside-in', session))
  end
  redis.call('SADD', prefix .. 'aside', session)
  local text = 'the session was running each time its worker died, ' .. row.attempts ..
               ' times, and has been set aside; an operator can list and retry it'
  bury(session, row, last,
       {'error', cmsgpack.pack({code = 'quarantined', message = text}), 'end', '1',
        'reason', 'quarantined', 'cancelled', tostring(behind)})
end

local function requeue(session, row)
  if row.status == 'closing' then return finish(session, row, 'close', nil, nil, '') end
  redis.call('SREM', prefix .. 'owned:' .. row.owner, session)
  redis.call('HSET', key('slot', session), 'status', 'waiting', 'owner', '')
  enqueue(session, 0)
end

-- Whether the worker counts as alive; one that does not must not own anything new.
local function alive(worker) return redis.call('EXISTS', prefix .. 'lease:' .. worker) == 1 end

-- Make `worker` the owner under a new epoch; returns what it needs to go on from the row.
local function own(session, row, worker)
  local slot, outbox = key('slot', session), key('out', session)
  local epoch = redis.call('INCR', prefix .. 'epoch')
  if row.owner ~= '' then redis.call('SREM', prefix .. 'owned:' .. row.owner, session) end
  redis.call('SADD', prefix .. 'owned:' .. worker, session)
  redis.call('HSET', slot, 'status', 'live', 'owner', worker, 'epoch', epoch)
  if row.trial ~= '' then redis.call('HDEL', slot, 'trial') end
  redis.call('ZREM', prefix .. 'waiting', session)
  if redis.call('EXISTS', outbox) == 0 then
    redis.pcall('XADD', outbox, '0-1', 'op', 'opened', 'worker', worker)
  end
  local held = redis.call('HMGET', slot, 'epoch', 'cursor', 'done', 'cuts', 'count', 'skipped',
                          'weights', 'layout', 'state', 'attempts')
  table.insert(held, 1, session)
  return held
end
