-- Ends a running attempt: its last replies, the result, the final status, and its lane entry's end, all or nothing.
-- KEYS: 1 job  2 body  3 log  4 result  5 lane stream  6 events
-- ARGV: 1 job id  2 attempt  3 expected offset  4 group  5 entry  6 status  7 status code  8 result body
--       9 output tokens  10 milliseconds since the first token, or ""  11 notice channel
--       12 keep record, 13 result, 14 log: milliseconds  15… last replies, kind and data in turn
-- Returns: "ok"; "already" when this attempt has finished the job before; "lost" when it is no longer this attempt's;
--          "gap" when the log stands elsewhere.
local record = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'offset', 'log')
if record[2] ~= ARGV[2] then return 'lost' end -- fence
if ended(record[1]) then return 'already' end -- fence
if record[1] ~= 'in_progress' then return 'lost' end -- fence
if record[3] ~= ARGV[3] then return 'gap' end -- fence
local offset = tonumber(record[3])
if record[4] == '1' then offset = append(KEYS[3], offset, 15) end
redis.call('HSET', KEYS[1], 'output_tokens', ARGV[9])
if ARGV[10] ~= '' then redis.call('HSET', KEYS[1], 'first_token_at_ms', now_ms() - ARGV[10]) end
conclude({ job = KEYS[1], body = KEYS[2], log = KEYS[3], result = KEYS[4], events = KEYS[6] },
  { job = ARGV[1], status = ARGV[6], code = ARGV[7], body = ARGV[8], offset = offset, channel = ARGV[11] },
  { record = ARGV[12], result = ARGV[13], log = ARGV[14] })
acknowledge(KEYS[5], ARGV[4], ARGV[5])
return 'ok'
