-- Cancels a job: a queued one ends at once (its lane entry stays as a tombstone that open drops: deleting an undelivered
-- entry would make the group's lag unknown); a running one is flagged, and its holder is told.
-- KEYS: 1 job  2 body  3 log  4 result  5 events  6 backlog
-- ARGV: 1 job id  2 result body  3 status code  4 notice channel  5 control channel of the workers
--       6 keep record, 7 result, 8 log: milliseconds
-- Returns: the status after the call, or false when there is no such job.
local record = redis.call('HMGET', KEYS[1], 'status', 'offset', 'stream', 'prompt_tokens')
-- A job that is unknown has no status, which is false and no living one either.
if ended(record[1]) then return record[1] end -- fence
if record[1] == 'in_progress' then
  redis.call('HSET', KEYS[1], 'cancel', 1)
  redis.call('PUBLISH', ARGV[5], ARGV[1])
  return record[1]
end
owe(KEYS[6], record[3], -record[4])
conclude({ job = KEYS[1], body = KEYS[2], log = KEYS[3], result = KEYS[4], events = KEYS[5] },
  { job = ARGV[1], status = 'cancelled', code = ARGV[3], body = ARGV[2], offset = tonumber(record[2]), channel = ARGV[4] },
  { record = ARGV[6], result = ARGV[7], log = ARGV[8] })
return 'cancelled'
