-- Count an attempt before a suspect is run alone. ARGV[5] worker, ARGV[6] session, ARGV[7] epoch.
-- Returns 1, or 0 where the session is not the worker's any more.
local row = row_of(ARGV[6])
if not row or (row.status ~= 'live' and row.status ~= 'closing') or row.owner ~= ARGV[5]
    or row.epoch ~= ARGV[7] then
  return 0
end
redis.call('HINCRBY', key('slot', ARGV[6]), 'attempts', 1)
return 1
