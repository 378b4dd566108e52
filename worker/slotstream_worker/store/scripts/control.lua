-- Apply the oldest control entries, in order, and delete them. Any worker may, full or not.
-- ARGV[4] how many at most. Returns {applied, not understood, left}.
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
             'mark', '', 'replies', entry.replies or '', 'opened', redis.call('TIME')[1])
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

local applied, ignored = 0, 0
for _, item in ipairs(redis.call('XRANGE', control, '-', '+', 'COUNT', ARGV[4])) do
  local entry = {}
  for i = 1, #item[2], 2 do entry[item[2][i]] = item[2][i + 1] end
  local session = entry.session or ''
  local named = #session <= 128 and string.match(session, '^[%w%._:/%-]+$')
  if named and entry.op == 'open' and #(entry.token or '') <= 64 then
    open(session, entry)
    applied = applied + 1
  elseif named and entry.op == 'close' then
    close(session)
    applied = applied + 1
  else
    ignored = ignored + 1
  end
  redis.call('XDEL', control, item[1])
end
return {applied, ignored, redis.call('XLEN', control)}
