-- How full each lane stream is. One that is missing is made, group and all: an autoscaler takes it for an error.
-- KEYS: 1 backlog  2… lane streams
-- ARGV: 1 group
-- Returns: four numbers a stream: entries that wait, entries that a worker holds, milliseconds that the next one has
--          waited, and the prompt tokens of the queued jobs; or the error for which a stream could not be made.
local function group_of(stream, name)
  for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local group = {}
    for i = 1, #fields, 2 do group[fields[i]] = fields[i + 1] end
    if group.name == name then return group end
  end
end
local answer = {}
for i = 2, #KEYS do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[i], ARGV[1], '0', 'MKSTREAM', 'ENTRIESREAD', 0)
  if made.err and redis.call('EXISTS', KEYS[i]) == 0 then return made end
  -- An account that went wrong, by an eviction or a worker that keeps none, is put right here.
  if redis.call('XLEN', KEYS[i]) == 0 then redis.pcall('HDEL', KEYS[1], KEYS[i]) end
  local group = group_of(KEYS[i], ARGV[1])
  local oldest = redis.call('XRANGE', KEYS[i], '(' .. group['last-delivered-id'], '+', 'COUNT', 1)[1]
  table.insert(answer, redis.call('XLEN', KEYS[i]) - group.pending)
  table.insert(answer, group.pending)
  table.insert(answer, oldest and math.max(0, now_ms() - oldest[1]:match('%d+')) or 0)
  table.insert(answer, tonumber(redis.call('HGET', KEYS[1], KEYS[i]) or 0))
end
return answer
