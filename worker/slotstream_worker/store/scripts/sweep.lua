-- Compare what a worker holds with the rows and the streams. Writes nothing.
--
-- ARGV[5] worker; then for each session: session, epoch, cuts, done, and the id of the last entry
-- read.
--
-- Returns two lists, of sessions counted from 1: those whose row is not that of this worker, live,
-- with these epoch, cuts and `done`, each followed by the row's status ('' : there is no row),
-- owner, epoch, done and cuts; and those whose stream holds an entry behind the last one read.
local worker = ARGV[5]
local others, unread = {}, {}
for i = 6, #ARGV, 5 do
  local session, epoch, cuts, done = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local number, read = (i - 1) / 5, ARGV[i + 4]
  local row = redis.pcall('HMGET', prefix .. 'slot:' .. session, 'status', 'owner', 'epoch', 'done',
                          'cuts')
  if row.err then row = {} end
  if row[1] ~= 'live' or row[2] ~= worker or row[3] ~= epoch or (row[4] or '0-0') ~= done
      or (row[5] or '0') ~= cuts then
    others[#others + 1] = number
    for k = 1, 5 do others[#others + 1] = row[k] or '' end
  end
  -- pcall: a key that is no stream holds nothing for anybody.
  local found = redis.pcall('XRANGE', prefix .. 'in:' .. session, '(' .. read, '+', 'COUNT', 1)
  if not found.err and #found > 0 then unread[#unread + 1] = number end
end
return {others, unread}
