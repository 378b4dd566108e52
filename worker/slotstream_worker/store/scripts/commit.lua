-- Commit answers, checkpoints, hand-backs and ends: atomic for a session, many sessions a call.
-- Fenced by owner, epoch, cuts and the `done` built on; safe to repeat. Nothing of a session is
-- written before all of it is checked, and one that fails does not touch the next.
--
-- ARGV[5] worker, then for each session
--   session epoch cuts base action reason mark n checkpoint
--     action: '' | 'handback' | 'end' (then reason, and the close mark that was reached, or '')
--     checkpoint: '1', then state layout weights; or '0'
--   n answers: id, '1' where it had no effect on the state, number of fields, field value ...
--
-- Returns for each session: ok | applied (the retry of a commit that was carried out) | lost |
-- full (ok, and its replies wait for their reader) | refused (`out` holds a later id already) |
-- busy (an idle session was to end, and an entry has come).
local worker = ARGV[5]

local function commit(session, epoch, cuts, base, action, reason, mark, state, layout, weights,
                      answers)
  local row = row_of(session)
  if not row or (row.status ~= 'live' and row.status ~= 'closing') or row.owner ~= worker
      or row.epoch ~= epoch then
    return 'lost'
  end
  -- Whatever becomes of the commit, its worker has lived through the trial.
  if row.trial ~= '' and row.trial ~= '0' then
    redis.call('HSET', key('slot', session), 'trial', '0')
  end
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
      added = redis.pcall('XADD', outbox, answer.id, unpack(ARGV, answer.from, answer.to))
    else
      added = redis.pcall('XADD', outbox, 'MAXLEN', '~', retention, answer.id,
                          unpack(ARGV, answer.from, answer.to))
    end
    if type(added) == 'table' then
      -- Ids rise within a commit, so only the first can be refused, and nothing is written yet:
      -- `out` holds a later id, or the last there is, or is no stream. Anything else is Redis's
      -- own condition.
      if i == 1 and (string.find(added.err, 'equal or smaller', 1, true)
                     or string.find(added.err, 'exhausted', 1, true)
                     or string.find(added.err, 'WRONGTYPE', 1, true)) then
        return 'refused'
      end
      return redis.error_reply(added.err)
    end
    if answer.skipped then skipped[#skipped + 1] = answer.id end
  end
  if ending then
    finish(session, row, reason, ending.id, {unpack(ARGV, ending.from, ending.to)}, mark)
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

local results, i = {}, 6
while i <= #ARGV do
  local session, epoch, cuts, base = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local action, reason, mark = ARGV[i + 4], ARGV[i + 5], ARGV[i + 6]
  local count, checkpoint = tonumber(ARGV[i + 7]), ARGV[i + 8] == '1'
  i = i + 9
  local state, layout, weights
  if checkpoint then
    state, layout, weights = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    i = i + 3
  end
  local answers = {}
  for n = 1, count do
    local fields = tonumber(ARGV[i + 2])
    answers[n] = {id = ARGV[i], skipped = ARGV[i + 1] == '1', from = i + 3, to = i + 2 + 2 * fields}
    i = i + 3 + 2 * fields
  end
  local result = commit(session, epoch, cuts, base, action, reason, mark, state, layout, weights,
                        answers)
  if type(result) == 'table' then return result end
  results[#results + 1] = result
end
return results
