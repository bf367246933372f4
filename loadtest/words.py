"""Common English words that are one token each in the usual BPE vocabularies.

They are one token both behind a space and at the beginning of a line: 1,024 of them, so that texts
drawn from them differ. A test checks them with the default model's tokenizer; for others
`writer.WordWriter.from_tokenizer` keeps those for which it is true.
"""

_TEXT = """
ability able about above academic accept access according account acid act action actions active
activity actual actually add added adult affected after again against age ago agree aim air allowed
almost alone along already also although always among analysis and animal animals another answer any
applied apply are area around art article ask aspect attack attempt attention author available
average avoid aware away back background bad balance bar base based basic basis because been before
begin behavior being belief below benefit best better between big bill birds birth bit black block
blood body book books born both bound box brain break broad build building built burn bus but called
came camp can capacity capital car carbon card care case cases cat cause caused cell cells center
central century certain change changed changes chapter character check child children choice choose
city civil claim class clean clear climate close coast code cold collect color come coming command
commit common community company complete complex computer concept condition conduct connect
connection consider constant construct construction contact contains content context continue
contract control cool copy core correct cost count countries country course cover create created
creating critical cross cultural culture current currently custom cut dark data date day days deal
death decision deep default degree demand depend design designed detail details detect develop
developed development device devices did difference different difficult digital direct display
distance doctor document does dog doing done down draw drug dry due during each early earth easy eat
eating economic education effective effects efficient egg either electric element elements else
email emotional end energy engine enough ensure enter environment equal essential establish even
event events ever every everything evidence exact example examples except exercise exist existing
expand expected experience experiment exposure expression extra eye face fact factor factors fail
fair faith fall families family famous far farm fast father feature features feed feel feet female
few field fields fight figure file final financial find finding fire first fish fit five fix flow
focus follow following food foods foot for force forces forest form former forms forward found four
free fresh friend friends from front fuel full fully fun function functions fund future gain game
games gas general generally getting give given giving global goal going gold good got government
graph great greater green ground group groups grow growing growth guide had half hand hands hard has
have having head health healthy heart heat help helps her here high higher his history hold home
host hot hours house how however human hundred ice idea identity image images impact important
include includes index individual industry inform initial input inside install instance instead into
issue issues job joint journal just keep key kids kind king know knowledge known lab land language
large largest last late later law laws layer lead leading learn least leave leaves led legal length
less let level levels life light like likely limit limited line lines link list little live lived
living load local located location log long look looking loss lost lot love low lower machine made
main major make making man many map mark market mass master material math matter may mean meaning
means measure measures media medical member members memory men mental message method methods micro
mid middle might military million mind minutes miss mix model models modern mom moment money month
months more most mother mount move movement much multiple music must name named names nation
national natural nature necessary need needed needs negative net network never new news next night
normal north not note nothing now number numbers object objects occur off offer often oil older once
one ones online only open options order original other others our out output outside over own pack
page pain paper parent parents part parts pass passed past path patient patients pattern patterns
pay peace people percent perfect perform performance perhaps period person personal pet physical
picture piece place placed places plan planet plant plants platform play point points policies
policy political poor popular population port position positive possible post pot potential power
practice present press pressure prevent previous price primary print prior private problem problems
process processes produced product products program programs progress project projects property
protection protein provided published purpose put quality question questions quick quite raise range
rare rate rates rather reach read reading real really reason receive received recent record red
reduce reduced reflect region regions regular related relationship relevant religious remember
remove report reported represent request required research resistance resource resources respect
respond rest results return review rich right rights rise risk road rock role room root rule rules
run running safe safety said same sample save say scale school science sea search season second
security see seen select self sense sent series service services setting several shape share shared
she short show shown side similar simple since sing single sit site sites six size skills skin sleep
slow small social soft software soil solar sold solution some someone something sometimes son soon
sound source sources south space special species specific speed spirit spread stage stand standard
start started state states status stay step steps still stop store stories story strength stress
strong structure student students studies study style subject success such sugar suggest summer sun
supply support surface symbol system table take taken taking talk target task tax teacher teachers
teaching team technology tell temperature ten term terms test tests text than that the then theory
there thing things think third this those though thought threat three through thus time times today
together too tool tools top topic total town track trade training travel treat treatment tree trees
true trust try turn two type types typically under understand unique unit until upon urban use used
user uses using usually valid value values vary version via video view virus visit visual want war
warm was waste watch water way ways weak weather web website week weight well went were what when
where whether which while white who whole whose why wide wild wind winter with within without woman
women wood word words work worked workers working works world worth would write writing written
wrong year yet young your
"""

WORDS = tuple(_TEXT.split())
