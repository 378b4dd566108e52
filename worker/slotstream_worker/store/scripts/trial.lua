-- Say that a suspect is about to run alone: a death under this epoch is then its own.
-- ARGV[5] worker, ARGV[6] session, ARGV[7] epoch, ARGV[8] cuts. May be repeated.
-- Returns 1, or 0 where the session is not the worker's any more, or an entry was cancelled.
local row = row_of(ARGV[6])
if not row or (row.status ~= 'live' and row.status ~= 'closing') or row.owner ~= ARGV[5]
    or row.epoch ~= ARGV[7] or row.cuts ~= ARGV[8] then
  return 0
end
redis.call('HSET', key('slot', ARGV[6]), 'trial', ARGV[7])
return 1
