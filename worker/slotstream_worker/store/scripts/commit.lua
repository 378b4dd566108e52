-- Commit answers, checkpoints, hand-backs and ends: atomic for a session, many sessions a call.
-- Fenced by owner, epoch, cuts and the `done` built on; safe to repeat. Nothing of a session is
-- written before all of it is checked, and one that fails does not touch the next.
--
-- ARGV[5] worker   ARGV[6] weights   ARGV[7] layout; then for each session
--   session epoch cuts base kind, and by its kind
--   a number n: n outputs, each an id and the encoded output, all made with these weights. The
--     usual commit, and nothing else.
--   '+' and a number n: n outputs, and then the state after them, of these weights and this layout.
--   '*': action reason mark checkpoint answers
--     action: '' | 'handback' | 'end' (then reason, and the close mark that was reached, or '')
--     checkpoint: '1', then state layout weights; or '0'
--     answers: how many; each an id, '1' where it had no effect on the state, number of fields,
--       field value ...
--
-- Returns the sessions, counted from 1, that are not simply `ok`, each followed by what became of
-- it: applied (the retry of a commit that was carried out) | lost | full (ok, and its replies wait
-- for their reader) | refused (`out` holds a later id already) | busy (an idle session was to end,
-- and an entry has come).
local worker, served, served_layout = ARGV[5], ARGV[6], ARGV[7]

-- Whether the first reply of a commit was refused, and not by a condition of Redis's own. Ids rise
-- within a commit, so only the first can be, and nothing is written yet: `out` holds a later id, or
-- the last there is, or is no stream.
local function refuses(added)
  return string.find(added.err, 'equal or smaller', 1, true)
      or string.find(added.err, 'exhausted', 1, true)
      or string.find(added.err, 'WRONGTYPE', 1, true)
end

local function commit(session, epoch, cuts, base, action, reason, mark, state, layout, weights,
                      answers)
  local row = row_of(session)
  if not row or (row.status ~= 'live' and row.status ~= 'closing') or row.owner ~= worker
      or row.epoch ~= epoch then
    return 'lost'
  end
  -- Whatever becomes of the commit, its worker has lived through the trial.
  if row.trial ~= '' then redis.call('HDEL', key('slot', session), 'trial') end
  if row.cuts ~= cuts then return 'lost' end
  local last = #answers > 0 and answers[#answers].id or base
  if row.done ~= base then return row.done == last and 'applied' or 'lost' end

  if reason == 'idle'
      and #redis.pcall('XRANGE', key('in', session), '(' .. last, '+', 'COUNT', 1) > 0 then
    return 'busy'
  end

  local slot, outbox = key('slot', session), key('out', session)
  local ending
  if action == 'end' and #answers > 0 and reason == 'end' then
    ending = table.remove(answers)
    if #answers == 0 and not later(ending.id, last_id(outbox)) then return 'refused' end
  end
  local skipped = {}
  for i, answer in ipairs(answers) do
    local added
    if row.replies == 'wait' then
      added = redis.pcall('XADD', outbox, answer.id, unpack(answer.fields))
    else
      added = redis.pcall('XADD', outbox, 'MAXLEN', '~', retention, answer.id,
                          unpack(answer.fields))
    end
    if type(added) == 'table' then
      if i == 1 and refuses(added) then return 'refused' end
      return redis.error_reply(added.err)
    end
    if answer.skipped then skipped[#skipped + 1] = answer.id end
  end
  if ending then
    finish(session, row, reason, ending.id, ending.fields, mark)
    return 'ok'
  end
  if action == 'end' then
    row.done = last
    finish(session, row, reason, nil, nil, mark)
    return 'ok'
  end

  if state then
    redis.call('HSET', slot, 'done', last, 'cursor', last, 'state', state, 'layout', layout,
               'weights', weights, 'count', '0', 'skipped', '')
    trim(key('in', session), last)
  elseif #answers > 0 then
    redis.call('HSET', slot, 'done', last)
    redis.call('HINCRBY', slot, 'count', #answers)
    if #skipped > 0 then
      local before = redis.call('HGET', slot, 'skipped') or ''
      redis.call('HSET', slot, 'skipped', before .. table.concat(skipped, ' ') .. ' ')
    end
  end
  if #answers > 0 and row.attempts ~= '0' then redis.call('HSET', slot, 'attempts', '0') end
  if action == 'handback' then
    row.done = last
    requeue(session, row)
  end
  if row.replies == 'wait' then
    local length = redis.pcall('XLEN', outbox)
    if type(length) == 'number' and length >= tonumber(retention) then return 'full' end
  end
  return 'ok'
end

-- The usual commit, in as few commands as can be; whatever is unusual about its row goes the long
-- way. `from` is the place of the first id in ARGV; `state` is nil without a checkpoint.
local function publish(session, epoch, cuts, base, from, n, state)
  local slot, outbox = prefix .. 'slot:' .. session, prefix .. 'out:' .. session
  local row = redis.pcall('HMGET', slot, 'status', 'owner', 'epoch', 'cuts', 'done', 'count',
                          'replies', 'attempts', 'trial')
  if not row.err and row[1] == 'live' and row[2] == worker and row[3] == epoch
      and (row[4] or '0') == cuts and (row[5] or '0-0') == base and (row[7] or '') == ''
      and (row[8] or '0') == '0' and (row[9] or '0') == '0' then
    local last = from + 2 * n - 2
    for at = from, last, 2 do
      local added
      if at == last then
        added = redis.pcall('XADD', outbox, 'MAXLEN', '~', retention, ARGV[at],
                            'output', ARGV[at + 1], 'weights', served)
      else
        added = redis.pcall('XADD', outbox, ARGV[at], 'output', ARGV[at + 1], 'weights', served)
      end
      if type(added) == 'table' then
        if at == from and refuses(added) then return 'refused' end
        return redis.error_reply(added.err)
      end
    end
    local done = n > 0 and ARGV[last] or base
    if state then
      redis.call('HSET', slot, 'done', done, 'cursor', done, 'state', state,
                 'layout', served_layout, 'weights', served, 'count', '0', 'skipped', '')
      trim(prefix .. 'in:' .. session, done)
    else
      redis.call('HSET', slot, 'done', done, 'count', string.format('%.0f', (row[6] or 0) + n))
    end
    return 'ok'
  end
  local answers = {}
  for k = 1, n do
    local at = from + 2 * k - 2
    answers[k] = {id = ARGV[at], fields = {'output', ARGV[at + 1], 'weights', served}}
  end
  return commit(session, epoch, cuts, base, '', '', '', state, served_layout, served, answers)
end

local results, i, number = {}, 8, 0
while i <= #ARGV do
  local session, epoch, cuts, base = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local kind, result = ARGV[i + 4], nil
  number, i = number + 1, i + 5
  if kind ~= '*' then
    local n = tonumber(kind)
    local from, state = i, nil
    i = i + 2 * n
    if string.sub(kind, 1, 1) == '+' then
      state, i = ARGV[i], i + 1
    end
    result = publish(session, epoch, cuts, base, from, n, state)
  else
    local action, reason, mark, checkpoint = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3] == '1'
    i = i + 4
    local state, layout, weights
    if checkpoint then
      state, layout, weights = ARGV[i], ARGV[i + 1], ARGV[i + 2]
      i = i + 3
    end
    local answers, count = {}, tonumber(ARGV[i])
    i = i + 1
    for k = 1, count do
      local fields = tonumber(ARGV[i + 2])
      answers[k] = {id = ARGV[i], skipped = ARGV[i + 1] == '1',
                    fields = {unpack(ARGV, i + 3, i + 2 + 2 * fields)}}
      i = i + 3 + 2 * fields
    end
    result = commit(session, epoch, cuts, base, action, reason, mark, state, layout, weights,
                    answers)
  end
  if type(result) == 'table' then return result end
  if result ~= 'ok' then
    results[#results + 1] = number
    results[#results + 1] = result
  end
end
return results
