-- The table of a plan's memory: bytes by class, one column for each rank or group of ranks.
local util = require "dtrain.util"

local M = {}

M.classes = { "parameters", "gradients", "optimizer states", "activations", "temporaries", "communication buffers",
  "inputs and buffers" }

--- columns: list of { title, plan:memory() }. Returns lines joined by newlines; figures in bytes.
function M.table(columns)
  local rows, sums = {}, {}
  for _, class in ipairs(M.classes) do
    local row = { class }
    for c, column in ipairs(columns) do
      local n = column[2][class] or 0
      row[c + 1] = util.commas(n)
      sums[c] = (sums[c] or 0) + n
    end
    rows[#rows + 1] = row
  end
  local total = { "total" }
  for c = 1, #columns do total[c + 1] = util.commas(sums[c]) end
  rows[#rows + 1] = total
  local head = { "bytes" }
  for c, column in ipairs(columns) do head[c + 1] = column[1] end
  table.insert(rows, 1, head)
  local widths = {}
  for _, row in ipairs(rows) do
    for c, text in ipairs(row) do widths[c] = math.max(widths[c] or 0, #text) end
  end
  return table.concat(util.map(rows, function(row)
    return table.concat(util.map(row, function(text, c)
      local gap = (" "):rep(widths[c] - #text)
      return c == 1 and text .. gap or gap .. text
    end), "  ")
  end), "\n")
end

return M
