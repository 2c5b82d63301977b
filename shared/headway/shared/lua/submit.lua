-- Accepts a job: writes its record and body and puts it into its lane, all or nothing.
-- KEYS: 1 job  2 body  3 lane stream  4 lane set  5 events  6 backlog
-- ARGV: 1 job id  2 body  3 group  4 lane as "<model>:<lane>"  5 prompt tokens  6 reserve tokens  7 choices
--       8… the record's other fields, name and value in turn
-- Returns: "queued", or "already" when this id was accepted before (the answer to it was lost).
if redis.call('EXISTS', KEYS[1]) == 1 then return 'already' end -- fence
redis.call('SADD', KEYS[4], ARGV[4])
local entry = enqueue(KEYS[3], ARGV[3], ARGV[1], ARGV[5], ARGV[6], ARGV[7])
owe(KEYS[6], KEYS[3], ARGV[5])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('HSET', KEYS[1], 'status', 'queued', 'attempt', 0, 'offset', 0, 'stream', KEYS[3], 'entry', entry, 'queued_at_ms', now_ms(),
  'prompt_tokens', ARGV[5], 'reserve_tokens', ARGV[6], 'choices', ARGV[7], unpack(ARGV, 8))
event(KEYS[5], ARGV[1], 'queued')
return 'queued'
