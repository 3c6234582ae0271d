-- dt.plot: a small curve in the terminal, of Unicode block characters.
local util = require "dtrain.util"

local blocks = { "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█" }

--- dt.plot(values, { width = 64, height = 10, title = , x = label of the last value }) -> text. Values are averaged
--- over the columns; each column is a bar of `height` lines at most.
return function(values, options)
  local o = util.options("dt.plot", options,
    { { "width", "count", 64 }, { "height", "count", 10 }, { "title", "string" },
    { "x", "string" } })
  util.check("dt.plot", values, "table")
  if #values == 0 then return "(nothing to plot)" end
  local width, columns = math.min(o.width, #values), {}
  for c = 1, width do
    local a, b = (c - 1) * #values // width + 1, c * #values // width
    local sum = 0
    for i = a, b do sum = sum + values[i] end
    columns[c] = sum / (b - a + 1)
  end
  local low, high = math.huge, -math.huge
  for _, v in ipairs(columns) do low, high = math.min(low, v), math.max(high, v) end
  local span = high > low and high - low or 1
  local lines = {}
  if o.title then lines[1] = o.title end
  for row = o.height, 1, -1 do
    local cells = {}
    for c, v in ipairs(columns) do
      local level = (v - low) / span * (o.height * 8 - 1) + 1 - (row - 1) * 8
      cells[c] = level >= 8 and blocks[8] or level >= 1 and blocks[math.floor(level)] or " "
    end
    local label = row == o.height and ("%8.3f"):format(high) or row == 1 and ("%8.3f"):format(low) or (" "):rep(8)
    lines[#lines + 1] = label .. " │" .. table.concat(cells)
  end
  lines[#lines + 1] = (" "):rep(9) .. "└" .. ("─"):rep(width)
  local last = o.x or tostring(#values)
  lines[#lines + 1] = (" "):rep(10) .. "1" .. (" "):rep(math.max(1, width - 1 - #last)) .. last
  return table.concat(lines, "\n")
end
