-- A byte budget for activations (recompute.lua): what a script may write, and how many blocks it takes.
local util = require "dtrain.util"

local M = {}

local units = { B = 1, KB = 1e3, MB = 1e6, GB = 1e9, TB = 1e12, KIB = 2 ^ 10, MIB = 2 ^ 20, GIB = 2 ^ 30, TIB = 2 ^ 40 }

--- The number of bytes that a script means.
function M.bytes(v)
  if type(v) == "number" then return v end
  local number, unit = v:match("^%s*([%d.]+)%s*(%a*)%s*$")
  local size = number and units[unit == "" and "B" or unit:upper()]
  if not size or not tonumber(number) then
    util.fail("dt.job: parallel: recompute: budget %q is no size; write a number of bytes, or \"400MB\", \"1.5GiB\"", v)
  end
  return tonumber(number) * size
end

--- The fewest blocks whose plan keeps at most r.bytes: make() plans with r.first of them and says how many there are in r.count.
--- Plans for other microbatch sizes follow the first one's.
function M.fit(r, make)
  local best
  local function need(n)
    r.first = n
    local results = table.pack(make())
    local have = results[1]:memory().activations
    if have <= r.bytes then best = { r.first, results } end
    return have
  end
  local low, least = 0, need(0)
  if not best then
    least = math.min(least, need(math.huge))
    local high = r.count
    if not best then
      util.fail("parallel: recompute: budget %s bytes cannot be met: with all %d blocks recomputed the activations need %s "
        .. "bytes, %s too many; a smaller batch.micro needs less", util.commas(r.bytes // 1), high, util.commas(least),
        util.commas(math.ceil(least - r.bytes)))
    end
    while high - low > 1 do
      local n = (low + high) // 2
      if need(n) <= r.bytes then high = n else low = n end
    end
    if best[1] ~= high and best[1] ~= math.huge then need(high) end
  end
  r.first = best[1]
  return table.unpack(best[2], 1, best[2].n)
end

return M
