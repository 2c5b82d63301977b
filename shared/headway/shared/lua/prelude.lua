-- Prepended to every script. A line that ends in "-- fence" is what keeps a stale or repeated write out;
-- tests/mutate.py deletes each of them in turn and names the test that notices.
-- KEYS: none of its own. ARGV: none of its own. Returns: nothing; it defines the helpers below.

-- Unix milliseconds of the server, the only clock whose instants are stored.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Lifecycle events are kept only while a mirror has created the stream.
local function event(stream, job, name)
  redis.call('XADD', stream, 'NOMKSTREAM', 'MAXLEN', '~', 10000, '*', 'job', job, 'event', name)
end

local function ended(status)
  return status ~= 'queued' and status ~= 'in_progress'
end

-- Puts a job into a lane stream, whose group is made if need be; returns the entry. With ENTRIESREAD the group's lag is
-- known from the start.
local function enqueue(stream, group, job, prompt_tokens, reserve_tokens, choices)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM', 'ENTRIESREAD', 0)
  end
  return redis.call('XADD', stream, '*', 'job', job, 'prompt_tokens', prompt_tokens, 'reserve_tokens', reserve_tokens, 'choices', choices)
end

-- Keeps account of the prompt tokens that are queued in a lane stream.
local function owe(backlog, stream, tokens)
  redis.call('HINCRBY', backlog, stream, tokens)
end

-- XACK alone would free no memory.
local function acknowledge(stream, group, entry)
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- Writes pairs of (kind, data) from ARGV[first] on behind `offset`; the id of an entry is its offset.
local function append(log, offset, first)
  for i = first, #ARGV, 2 do
    offset = offset + 1
    redis.call('XADD', log, offset .. '-0', 'kind', ARGV[i], 'data', ARGV[i + 1])
  end
  return offset
end

-- The terminal step that finish and cancel share: the last entry, the result, the status, the expiries.
local function conclude(keys, end_of, keep)
  local offset = end_of.offset
  if redis.call('HGET', keys.job, 'log') == '1' then
    offset = offset + 1
    redis.call('XADD', keys.log, offset .. '-0', 'kind', 'end', 'data', end_of.status)
    redis.call('PEXPIRE', keys.log, keep.log)
  end
  redis.call('HSET', keys.job, 'status', end_of.status, 'status_code', end_of.code, 'offset', offset, 'finished_at_ms', now_ms())
  redis.call('SET', keys.result, end_of.body, 'PX', keep.result)
  redis.call('PEXPIRE', keys.body, keep.result)
  redis.call('PEXPIRE', keys.job, keep.record)
  event(keys.events, end_of.job, end_of.status)
  redis.call('PUBLISH', end_of.channel, offset)
end
