-- print(model): the tree of modules with their arguments and parameter counts, equal neighbours of a list on one line.
local M = require "dtrain.nn.module"
local parameter = require "dtrain.nn.parameter"
local util = require "dtrain.util"

-- A line is { indent, text, count }.
local function describe(module, name, indent, lines)
  local class = getmetatable(module).class
  local extra = class.extra and class.extra(module) or ""
  local title = class.name .. (extra ~= "" and "(" .. extra .. ")" or "")
  lines[#lines + 1] = { indent, name and name .. ": " .. title or title, M.base.count(module) }
  local blocks = {}
  M.base.each_child(module, function(child_name, child)
    if parameter.is(child) then
      if class.extra then return end -- a library layer: its arguments say it all
      local text = ("%s: %s%s"):format(child_name, child.type == "buffer" and "buffer " or "", util.show(child.shape))
      blocks[#blocks + 1] = { name = child_name,
        lines = { { indent + 1, text, child.trainable and child:numel() or 0 } } }
    else
      local own = {}
      describe(child, nil, indent + 1, own)
      blocks[#blocks + 1] = { name = child_name, lines = own, module = true }
    end
  end)
  local function same(a, b)
    if not (a.module and b.module and #a.lines == #b.lines) then return false end
    local list = a.name:match("^(.-)%d+$")
    if not list or list ~= b.name:match("^(.-)%d+$") then return false end
    for i = 1, #a.lines do
      if a.lines[i][2] ~= b.lines[i][2] or a.lines[i][3] ~= b.lines[i][3] then return false end
    end
    return true
  end
  local i = 1
  while i <= #blocks do
    local j = i
    while blocks[j + 1] and same(blocks[i], blocks[j + 1]) do j = j + 1 end
    local first = blocks[i].lines[1]
    if blocks[i].module then
      if j > i then
        first[2] = ("%s-%s: %d x %s"):format(blocks[i].name, blocks[j].name:match("%d+$"), j - i + 1, first[2])
        first[3] = first[3] * (j - i + 1)
      else
        first[2] = blocks[i].name .. ": " .. first[2]
      end
    end
    for _, line in ipairs(blocks[i].lines) do lines[#lines + 1] = line end
    i = j + 1
  end
end

return function(module)
  local lines, width = {}, 0
  describe(module, nil, 0, lines)
  for _, l in ipairs(lines) do width = math.max(width, 2 * l[1] + utf8.len(l[2])) end
  local out = {}
  for i, l in ipairs(lines) do
    local text = ("  "):rep(l[1]) .. l[2]
    local count = l[3] > 0 and util.commas(l[3]) or ""
    out[i] = count == "" and text or text .. (" "):rep(width - utf8.len(text) + 2) .. ("%12s"):format(count)
  end
  out[#out + 1] = util.commas(M.base.count(module)) .. " parameters"
  return table.concat(out, "\n")
end
