-- Publishes replies of a running attempt, behind the offset that the writer expects. Short ones are in the notice, so that
-- who follows closely need not read the log: "<first offset> <kind>:<length> …", a line end, and their data.
-- KEYS: 1 job  2 log
-- ARGV: 1 attempt  2 expected offset  3 notice channel  4… replies, kind and data in turn
-- Returns: {"ok", offset, cancel requested as 0 or 1}, or {"already", …} when these replies are there;
--          {"lost"} when the job is no longer this attempt's;
--          {"gap", offset} when the log stands elsewhere, which only a fault of the writer can bring about.
local record = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'offset', 'cancel')
local expected, offset = tonumber(ARGV[2]), tonumber(record[3])
if record[1] ~= 'in_progress' then return { 'lost' } end -- fence
if record[2] ~= ARGV[1] then return { 'lost' } end -- fence
if offset == expected + (#ARGV - 3) / 2 then return { 'already', offset, tonumber(record[4] or 0) } end -- fence
if offset ~= expected then return { 'gap', offset } end -- fence
local header, data = { offset + 1 }, {}
for i = 4, #ARGV, 2 do
  table.insert(header, ARGV[i] .. ':' .. #ARGV[i + 1])
  table.insert(data, ARGV[i + 1])
end
local notice = table.concat(header, ' ') .. '\n' .. table.concat(data)
offset = append(KEYS[2], offset, 4)
redis.call('HSET', KEYS[1], 'offset', offset)
redis.call('PUBLISH', ARGV[3], #notice > 8192 and offset or notice)
return { 'ok', offset, tonumber(record[4] or 0) }
