-- Every change to the catalogue of versions. Each may be repeated: an answer may have been lost.
-- KEYS[1] <prefix>state   ARGV[1] what to do   ARGV[2] version   ARGV[3...] as said below
-- Returns {outcome, detail}.
local prefix = string.sub(KEYS[1], 1, -6)
local what, version = ARGV[1], ARGV[2]
local entry = prefix .. 'v:' .. version
local leases = entry .. ':leases'
local state = prefix .. 'state'

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function status() return redis.call('HGET', entry, 'status') or '' end

local function current() return redis.call('HGET', state, 'current') or '' end

-- The version that new sessions begin on, and that all others move to.
local function point(to, policy)
  if current() == to then return end
  redis.call('RPUSH', prefix .. 'history', to)
  redis.call('LTRIM', prefix .. 'history', -64, -1)
  redis.call('HSET', state, 'current', to, 'on_weights', policy)
  redis.call('HINCRBY', state, 'generation', 1)
end

local function held()
  redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
  return redis.call('ZRANGE', leases, 0, -1)
end

local act = {}

-- ranks, rank, options, nonce, what the rank is about to write
function act.begin()
  local found = status()
  if found ~= '' and found ~= 'publishing' then return {'taken', found} end
  if found == '' then
    redis.call('HSET', entry, 'status', 'publishing', 'ranks', ARGV[3], 'options', ARGV[5],
               'created', now)
    redis.call('ZADD', prefix .. 'versions', redis.call('INCR', prefix .. 'sequence'), version)
  elseif redis.call('HGET', entry, 'ranks') ~= ARGV[3]
      or redis.call('HGET', entry, 'options') ~= ARGV[5] then
    return {'differs', redis.call('HGET', entry, 'ranks') .. ' ranks, ' ..
                       redis.call('HGET', entry, 'options')}
  end
  redis.call('HSET', entry .. ':written', ARGV[6], ARGV[7])
  redis.call('HSET', entry, 'touched', now)
  return {'ok', ''}
end

-- rank, its part of the manifest
function act.register()
  if status() ~= 'publishing' then return {'taken', status()} end
  redis.call('HSET', entry .. ':parts', ARGV[3], ARGV[4])
  redis.call('HSET', entry, 'touched', now)
  return {'ok', ''}
end

-- manifest, bytes, fingerprint, content, on_weights, at_once
function act.ready()
  local found = status()
  if found == 'ready' and redis.call('HGET', entry, 'manifest') == ARGV[3] then return {'ok', ''} end
  if found ~= 'publishing' then return {'taken', found} end
  redis.call('HSET', entry, 'status', 'ready', 'manifest', ARGV[3], 'bytes', ARGV[4],
             'fingerprint', ARGV[5], 'content', ARGV[6], 'on_weights', ARGV[7], 'ready', now)
  redis.call('DEL', entry .. ':parts')
  if ARGV[8] == '1' then
    redis.call('HSET', state, 'candidate', version)
    redis.call('HINCRBY', state, 'generation', 1)
  else
    redis.call('HDEL', state, 'candidate')
    point(version, ARGV[7])
  end
  return {'ok', ''}
end

-- reason, who, and the workers that must all have refused it: nobody serves it, so nobody is to
function act.refuse()
  local found = status()
  if found == 'refused' then return {'ok', ''} end
  redis.call('HSET', entry .. ':workers', ARGV[4], 'refused: ' .. ARGV[3])
  for _, said in ipairs(redis.call('HVALS', entry .. ':workers')) do
    if said == 'applied' then return {'served', ''} end
  end
  if found == '' then return {'gone', ''} end
  for k = 5, #ARGV do
    local said = redis.call('HGET', entry .. ':workers', ARGV[k]) or ''
    if string.sub(said, 1, 7) ~= 'refused' then return {'wait', ARGV[k]} end
  end
  redis.call('HSET', entry, 'status', 'refused', 'reason', ARGV[3])
  if redis.call('HGET', state, 'candidate') == version then
    redis.call('HDEL', state, 'candidate')
    redis.call('HINCRBY', state, 'generation', 1)
  end
  if current() == version then
    -- Back to the last one that was not refused; '' is what the workers were started with.
    local history = redis.call('LRANGE', prefix .. 'history', 0, -1)
    local back = ''
    for k = #history, 1, -1 do
      local name = history[k]
      if name ~= version and redis.call('HGET', prefix .. 'v:' .. name, 'status') == 'ready' then
        back = name
        break
      end
    end
    point(back, 'keep')
  end
  return {'ok', ''}
end

-- holder, for how long (ms): while it lasts the version is not deleted
function act.lease()
  local found = status()
  if found ~= 'ready' then return {found == '' and 'gone' or found, redis.call('HGET', entry,
                                   'reason') or ''} end
  redis.call('ZADD', leases, now + tonumber(ARGV[4]), ARGV[3])
  return {'ok', ''}
end

-- holder
function act.unlease()
  redis.call('ZREM', leases, ARGV[3])
  return {'ok', ''}
end

-- policy: roll back, or forward, to a version that is ready ('' for what the workers began with)
function act.point()
  if version ~= '' and status() ~= 'ready' then return {'gone', status()} end
  redis.call('HDEL', state, 'candidate')
  point(version, ARGV[3])
  return {'ok', ''}
end

-- worker, 'verified' or 'applied', then the workers that are alive: once all of those have verified
-- a candidate it becomes current. Without any it is only noted.
function act.report()
  redis.call('HSET', entry .. ':workers', ARGV[3], ARGV[4])
  if redis.call('HGET', state, 'candidate') ~= version then
    return {current() == version and 'go' or 'wait', ''}
  end
  if #ARGV < 5 then return {'wait', ''} end
  for k = 5, #ARGV do
    local said = redis.call('HGET', entry .. ':workers', ARGV[k]) or ''
    if said ~= 'verified' and said ~= 'applied' then return {'wait', ARGV[k]} end
  end
  redis.call('HDEL', state, 'candidate')
  point(version, redis.call('HGET', entry, 'on_weights') or 'keep')
  return {'go', ''}
end

-- 'force' or '': begin to delete; nobody can lease it from here on
function act.delete()
  local found = status()
  if found == '' then return {'gone', ''} end
  if current() == version then return {'current', ''} end
  if redis.call('HGET', state, 'candidate') == version and found == 'ready' then
    return {'current', ''}
  end
  local holders = held()
  if #holders > 0 and ARGV[3] ~= 'force' then return {'leased', table.concat(holders, ', ')} end
  if found ~= 'deleting' then redis.call('HSET', entry, 'status', 'deleting', 'was', found) end
  return {'ok', ''}
end

-- It is named by a session's row after all.
function act.undelete()
  if status() == 'deleting' then
    redis.call('HSET', entry, 'status', redis.call('HGET', entry, 'was') or 'refused')
  end
  return {'ok', ''}
end

-- Its chunks are gone: forget it.
function act.forget()
  if status() ~= 'deleting' then return {status(), ''} end
  redis.call('DEL', entry, leases, entry .. ':parts', entry .. ':written', entry .. ':workers',
             entry .. ':canary', entry .. ':seed')
  redis.call('ZREM', prefix .. 'versions', version)
  redis.call('LREM', prefix .. 'history', 0, version)
  return {'ok', ''}
end

return act[what]()
