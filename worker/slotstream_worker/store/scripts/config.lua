-- Write the app's configuration where there is none; returns the one that holds.
-- KEYS[1] the configuration; ARGV field value ...
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], unpack(ARGV)) end
return redis.call('HGETALL', KEYS[1])
