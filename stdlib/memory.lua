-- The table of a plan's memory: bytes by class, one column for each rank or group of ranks.
local util = require "dtrain.util"

local M = {}

M.classes = { "parameters", "gradients", "optimizer states", "activations", "temporaries", "communication buffers",
  "inputs and buffers" }

--- Bytes of all classes together.
function M.sum(m)
  local n = 0
  for _, class in ipairs(M.classes) do n = n + (m[class] or 0) end
  return n
end

-- Beyond so many columns the table lies on its side.
local WIDE = 9

local function turned(rows)
  local out = {}
  for r, row in ipairs(rows) do
    for c, text in ipairs(row) do
      out[c] = out[c] or {}
      out[c][r] = text
    end
  end
  return out
end

--- columns: list of { title, plan:memory() }. Returns lines joined by newlines; figures in bytes.
function M.table(columns)
  local rows = { { "bytes" } }
  for _, class in ipairs(M.classes) do rows[#rows + 1] = { class } end
  rows[#rows + 1] = { "total" }
  for _, column in ipairs(columns) do
    table.insert(rows[1], column[1])
    for i, class in ipairs(M.classes) do table.insert(rows[i + 1], util.commas(column[2][class] or 0)) end
    table.insert(rows[#rows], util.commas(M.sum(column[2])))
  end
  if #columns > WIDE then rows = turned(rows) end
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
