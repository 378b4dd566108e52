-- Apply the oldest control entries, in order, and delete them. Any worker may, full or not.
-- ARGV[5...] their ids and sessions in turn, as read from the start of the stream. Those that
-- another worker has applied meanwhile are passed over; at one that is not the oldest this stops.
-- Returns {applied, not understood}.
local control = prefix .. 'control'

local function open(session, entry)
  local token = entry.token or ''
  local row = row_of(session)
  if row and row.status ~= 'closed' then return end
  if row and token ~= '' and row.token == token then return end
  redis.call('DEL', key('out', session), key('slot', session))
  redis.call('HSET', key('slot', session), 'status', 'waiting', 'owner', '', 'epoch', '0',
             'cursor', '0-0', 'done', '0-0', 'state', '', 'layout', '', 'weights', '',
             'count', '0', 'skipped', '', 'cuts', '0', 'attempts', '0', 'token', token,
             'opened', redis.call('TIME')[1])
  if (entry.replies or '') ~= '' then
    redis.call('HSET', key('slot', session), 'replies', entry.replies)
  end
  if redis.call('EXISTS', key('aside', session)) == 1 then
    redis.call('HSET', key('aside', session), 'superseded', '1')
  end
  redis.call('SADD', prefix .. 'sessions', session)
  enqueue(session, 1)
end

local function close(session)
  local row = row_of(session)
  if not row then return end
  if row.status == 'waiting' then
    finish(session, row, 'close', nil, nil, '')
  elseif row.status == 'live' then
    -- Refused only where `in` has no larger id left; the owner's sweep then sees the status.
    local mark = redis.pcall('XADD', key('in', session), '*', 'op', 'close')
    if type(mark) == 'table' then mark = '' end
    redis.call('HSET', key('slot', session), 'status', 'closing', 'mark', mark)
  end
end

-- Returns 1 where the entry is understood. Its session is the one that was declared.
local function apply(fields, declared)
  local entry = {}
  for i = 1, #fields, 2 do entry[fields[i]] = fields[i + 1] end
  local session = entry.session or ''
  if session ~= declared or #session > 128 or not string.match(session, '^[%w%._:/%-]+$') then
    return 0
  end
  if entry.op == 'open' and #(entry.token or '') <= 64 then
    open(session, entry)
  elseif entry.op == 'close' then
    close(session)
  else
    return 0
  end
  return 1
end

local applied, ignored = 0, 0
for n = 5, #ARGV, 2 do
  local oldest = redis.call('XRANGE', control, '-', '+', 'COUNT', 1)[1]
  -- After a failover older ones may be back: they are read again, and come first.
  if not oldest or later(ARGV[n], oldest[1]) then break end
  if oldest[1] == ARGV[n] then
    local understood = apply(oldest[2], ARGV[n + 1])
    applied, ignored = applied + understood, ignored + 1 - understood
    redis.call('XDEL', control, oldest[1])
  end
end
return {applied, ignored}
