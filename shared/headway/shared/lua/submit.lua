-- Accepts a job: writes its record and body and puts it into its lane, all or nothing.
-- KEYS: 1 job  2 body  3 lane stream  4 lane set  5 events
-- ARGV: 1 job id  2 body  3 group  4 lane as "<model>:<lane>"  5 prompt tokens  6 reserve tokens  7 choices
--       8… the record's other fields, name and value in turn
-- Returns: "queued", or "already" when this id was accepted before (the answer to it was lost).
if redis.call('EXISTS', KEYS[1]) == 1 then return 'already' end -- fence
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[3], ARGV[3], '0', 'MKSTREAM', 'ENTRIESREAD', 0)
end
redis.call('SADD', KEYS[4], ARGV[4])
local entry = redis.call('XADD', KEYS[3], '*', 'job', ARGV[1], 'prompt_tokens', ARGV[5], 'reserve_tokens', ARGV[6], 'choices', ARGV[7])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('HSET', KEYS[1], 'status', 'queued', 'attempt', 0, 'offset', 0, 'stream', KEYS[3], 'entry', entry, 'queued_at_ms', now_ms(),
  'prompt_tokens', ARGV[5], 'reserve_tokens', ARGV[6], 'choices', ARGV[7], unpack(ARGV, 8))
event(KEYS[5], ARGV[1], 'queued')
return 'queued'
