-- Takes waiting entries for a worker, lane by lane, without waiting. XREADGROUP itself counts for each stream apart, and a
-- call for each stream would be a dozen round trips.
-- KEYS: the streams of each lane, in the order in which they are read
-- ARGV: 1 group  2 worker  3 most entries in all  4 streams of a lane  5… room of each lane
-- Returns: {stream, entry, fields} of each entry; it is the worker's from now on.
local answer = {}
local streams = tonumber(ARGV[4])
for lane = 1, #ARGV - 4 do
  local room = tonumber(ARGV[lane + 4])
  for i = (lane - 1) * streams + 1, lane * streams do
    local count = math.min(room, ARGV[3] - #answer)
    local read = count > 0 and redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', count, 'STREAMS', KEYS[i], '>')
    for _, entry in ipairs(read and read[1][2] or {}) do
      table.insert(answer, { KEYS[i], entry[1], entry[2] })
      room = room - 1
    end
  end
end
return answer
