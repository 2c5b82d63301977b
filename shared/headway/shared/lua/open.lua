-- Starts an attempt for a lane entry that this worker has read.
-- KEYS: 1 job  2 body  3 the stream that the entry was read from  4 events  5 backlog
-- ARGV: 1 job id  2 entry  3 group  4 worker  5 batch name  6 jobs in the batch  7 why the batch closed
--       8 its window in milliseconds
-- Returns: {"opened", record as a flat list, body}; the same again when this worker has it open already;
--          {"lost"} when another worker has it;
--          {"gone"} when the record is gone or names another entry, {"ended"} when the job has ended: nothing is left
--          to do, and the entry is acknowledged and deleted.
local function drop(why)
  acknowledge(KEYS[3], ARGV[3], ARGV[2])
  return { why }
end
local function opened()
  return { 'opened', redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]) }
end
local record = redis.call('HMGET', KEYS[1], 'status', 'stream', 'entry', 'worker', 'prompt_tokens')
if record[2] ~= KEYS[3] or record[3] ~= ARGV[2] then return drop('gone') end -- fence
if ended(record[1]) then return drop('ended') end -- fence
if record[1] == 'in_progress' and record[4] == ARGV[4] then return opened() end -- fence
if record[1] == 'in_progress' then return { 'lost' } end -- fence
owe(KEYS[5], KEYS[3], -record[5])
redis.call('HINCRBY', KEYS[1], 'attempt', 1)
redis.call('HSET', KEYS[1], 'status', 'in_progress', 'worker', ARGV[4], 'started_at_ms', now_ms(),
  'batch', ARGV[5], 'batch_size', ARGV[6], 'batch_closed_by', ARGV[7], 'batch_window_ms', ARGV[8])
event(KEYS[4], ARGV[1], 'in_progress')
return opened()
