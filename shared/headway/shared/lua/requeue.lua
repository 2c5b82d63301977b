-- The one way back: the job goes to the stream of its lane that is read first.
-- KEYS: 1 job  2 the stream that holds its entry  3 the lane's returned stream  4 events  5 backlog
-- ARGV: 1 job id  2 attempt, or "" for an entry that was read but not opened  3 group  4 entry  5 reason
--       6 1 when the engine has failed under the job, else 0
-- Returns: "ok"; "lost" when the entry or the job is no longer the caller's, or was given back before: of an entry that
--          was not opened nothing is left to do then, and it is acknowledged and deleted;
--          "cancelled" when a cancel waits: the holder shall finish the job instead.
local record = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'stream', 'entry', 'cancel', 'prompt_tokens', 'reserve_tokens', 'choices')
local unopened = ARGV[2] == ''
local function drop()
  acknowledge(KEYS[2], ARGV[3], ARGV[4])
  return 'lost'
end
if unopened and (record[3] ~= KEYS[2] or record[4] ~= ARGV[4]) then return drop() end -- fence
if unopened and ended(record[1]) then return drop() end -- fence
if record[1] ~= (unopened and 'queued' or 'in_progress') then return 'lost' end -- fence
if not unopened and record[2] ~= ARGV[2] then return 'lost' end -- fence
if record[5] == '1' then return 'cancelled' end -- fence
acknowledge(KEYS[2], ARGV[3], ARGV[4])
if unopened then owe(KEYS[5], KEYS[2], -record[6]) end
owe(KEYS[5], KEYS[3], record[6])
local entry = enqueue(KEYS[3], ARGV[3], ARGV[1], record[6], record[7], record[8])
redis.call('HINCRBY', KEYS[1], 'failures', ARGV[6])
redis.call('HSET', KEYS[1], 'status', 'queued', 'stream', KEYS[3], 'entry', entry, 'worker', '', 'returned_for', ARGV[5])
event(KEYS[4], ARGV[1], 'returned')
return 'ok'
