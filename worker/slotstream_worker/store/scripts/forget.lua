-- Tell the readers of sessions that Redis has lost: their rows are gone, with what they remembered.
-- ARGV[5...] session, and the last id its worker knew, in turn. Returns how many were told.
local told = 0
for i = 5, #ARGV, 2 do
  local session = ARGV[i]
  if redis.call('EXISTS', key('slot', session)) == 0 then
    local a, b = last_id(key('in', session)), last_id(key('out', session))
    local id = later(a, b) and a or b
    if later(ARGV[i + 1], id) then id = ARGV[i + 1] end
    local behind, cancelled = redis.pcall('XRANGE', key('in', session), '(' .. b, '+'), 0
    for _, entry in ipairs(behind.err and {} or behind) do
      local fields = entry[2]
      if not (#fields == 2 and fields[1] == 'op' and fields[2] == 'close') then
        cancelled = cancelled + 1
      end
    end
    local text = 'Redis has lost this session\'s row, and with it its state; open it anew'
    bury(session, {token = '', owner = ''}, after(id),
         {'error', cmsgpack.pack({code = 'forgotten', message = text}), 'end', '1',
          'reason', 'forgotten', 'cancelled', tostring(cancelled)})
    told = told + 1
  end
end
return told
