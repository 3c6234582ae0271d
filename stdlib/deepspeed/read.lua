-- Reads one object of a DeepSpeed configuration by a table of rows, so that no key goes unseen. A row is
--   { kind }                         taken: its value goes into the result (kind: of util.check, or "object")
--   { kind, refuse = text, is = v }  refused with this advice, unless the value is v (a value or a function of it)
--   { kind, same = text, is = v }    changes nothing here, and is listed in reader.same unless the value is v
-- An alias names the key that it stands for: stage3_x = "x".
local core = require "dtrain.core"
local util = require "dtrain.util"

local Reader = {}
Reader.__index = Reader

local M = {}

--- A reader of the file `path`; reader.same collects the keys that change nothing.
function M.new(path) return setmetatable({ path = path, same = {} }, Reader) end

--- Raises "script:line: ds.json: key: text".
function Reader:fail(key, fmt, ...)
  util.fail("%s: %s%s", self.path, key ~= "" and key .. ": " or "", select("#", ...) > 0 and fmt:format(...) or fmt)
end

local function neutral(row, value)
  if type(row.is) == "function" then return row.is(value) end
  return row.is ~= nil and row.is == value
end

--- An object's values by key; `at` is its own name ("" at the top).
function Reader:object(at, t, rows)
  local function name(key) return at == "" and key or at .. "." .. key end
  if type(t) ~= "table" or #t > 0 then self:fail(at, "wants an object { ... }, got %s", util.show(t)) end
  local out = {}
  for key, value in util.sorted(t) do
    local row, own = rows[key], key
    if type(row) == "string" then row, own = rows[row], row end
    if not row then self:fail(name(key), "is no key that dtrain knows; %s", util.suggest(key, util.keys(rows))) end
    if value == "auto" and not row.auto then
      self:fail(name(key), "\"auto\" is filled in by Hugging Face's Trainer; write the value")
    end
    if value ~= core.null then -- null: as if the key were not there
      if row[1] == "object" then
        if type(value) ~= "table" or #value > 0 then
          self:fail(name(key), "wants an object { ... }, got %s", util.show(value))
        end
      else
        util.check(self.path .. ": " .. name(key), value, row[1])
        if row[1] == "count" or row[1] == "integer" then value = math.tointeger(value) end
      end
      if row.refuse then
        if not neutral(row, value) then self:fail(name(key), row.refuse) end
      elseif row.same then
        if not neutral(row, value) then self.same[#self.same + 1] = name(key) end
      else
        if out[own] ~= nil then self:fail(name(key), "is given twice, also as %s; give one", own) end
        out[own] = value
      end
    end
  end
  return out
end

return M
